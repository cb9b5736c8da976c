// LD_PRELOAD shim: pretends one sm_90 device exists so ORT's CUDA EP can be *constructed* (kernel registry,
// partitioning, memcpy insertion, CUDA-graph eligibility check). Kernels are no-ops: outputs are garbage.
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
#include <malloc.h>
#undef cudaGetDeviceProperties
static int capturing=0; static long launches=0, memcpys=0, syncs=0, graphlaunch=0, hostcopies=0;
static void* A(size_t n){void*p=0; if(!n)n=256; if(posix_memalign(&p,256,n))return 0; if(n<=(64u<<20))memset(p,0,n); return p;} /* more is new to the process, so zeros too */
cudaError_t cudaGetDeviceCount(int*c){*c=1;return 0;}
cudaError_t cudaGetDevice(int*d){*d=0;return 0;}
cudaError_t cudaSetDevice(int d){return 0;}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp*p,int d){memset(p,0,sizeof *p);strcpy(p->name,"EMULATED sm_90");
 p->totalGlobalMem=139ULL<<30;p->sharedMemPerBlock=49152;p->regsPerBlock=65536;p->warpSize=32;p->memPitch=1<<30;p->maxThreadsPerBlock=1024;
 p->maxThreadsDim[0]=1024;p->maxThreadsDim[1]=1024;p->maxThreadsDim[2]=64;p->maxGridSize[0]=2147483647;p->maxGridSize[1]=65535;p->maxGridSize[2]=65535;
 p->totalConstMem=65536;p->major=9;p->minor=0;p->textureAlignment=512;p->multiProcessorCount=132;p->maxThreadsPerMultiProcessor=2048;
 p->sharedMemPerMultiprocessor=233472;p->sharedMemPerBlockOptin=232448;p->l2CacheSize=62914560;p->unifiedAddressing=1;p->memoryBusWidth=6144;return 0;}
cudaError_t cudaDeviceGetAttribute(int*v,enum cudaDeviceAttr a,int d){switch(a){case cudaDevAttrComputeCapabilityMajor:*v=9;break;case cudaDevAttrComputeCapabilityMinor:*v=0;break;
 case cudaDevAttrMultiProcessorCount:*v=132;break;case cudaDevAttrMaxSharedMemoryPerBlockOptin:*v=232448;break;case cudaDevAttrMaxSharedMemoryPerBlock:*v=49152;break;default:*v=1024;}return 0;}
cudaError_t cudaDeviceSynchronize(void){return 0;}
cudaError_t cudaDeviceGetPCIBusId(char*s,int n,int d){snprintf(s,n,"0000:00:00.0");return 0;}
cudaError_t cudaDriverGetVersion(int*v){*v=13000;return 0;} cudaError_t cudaRuntimeGetVersion(int*v){*v=13000;return 0;}
cudaError_t cudaEventCreate(cudaEvent_t*e){*e=(cudaEvent_t)A(8);return 0;} cudaError_t cudaEventCreateWithFlags(cudaEvent_t*e,unsigned f){*e=(cudaEvent_t)A(8);return 0;}
cudaError_t cudaEventDestroy(cudaEvent_t e){return 0;} cudaError_t cudaEventElapsedTime(float*f,cudaEvent_t a,cudaEvent_t b){*f=1;return 0;}
cudaError_t cudaEventRecord(cudaEvent_t e,cudaStream_t s){return 0;} cudaError_t cudaEventRecordWithFlags(cudaEvent_t e,cudaStream_t s,unsigned f){return 0;}
cudaError_t cudaEventSynchronize(cudaEvent_t e){syncs++;return 0;}
static long mbytes=0; long emu_malloc_bytes(void){long x=mbytes;mbytes=0;return x;} static size_t used=0; static size_t all_bytes(void){const char*v=getenv("EMU_MEMORY");return v?strtoull(v,0,10):139ULL<<30;} /* bytes of the device */
cudaError_t cudaMalloc(void**p,size_t n){*p=0;if(n>all_bytes()-used)return 2;mbytes+=n;*p=A(n);used+=malloc_usable_size(*p);return *p?0:2;} cudaError_t cudaMallocHost(void**p,size_t n){*p=A(n);return 0;} cudaError_t cudaHostAlloc(void**p,size_t n,unsigned f){*p=A(n);return 0;}
cudaError_t cudaFree(void*p){used-=malloc_usable_size(p);free(p);return 0;} cudaError_t cudaFreeHost(void*p){free(p);return 0;} cudaError_t cudaFreeAsync(void*p,cudaStream_t s){free(p);return 0;}
cudaError_t cudaMallocFromPoolAsync(void**p,size_t n,cudaMemPool_t m,cudaStream_t s){*p=A(n);return 0;}
cudaError_t cudaMemPoolCreate(cudaMemPool_t*p,const struct cudaMemPoolProps*x){*p=(cudaMemPool_t)A(8);return 0;} cudaError_t cudaMemPoolDestroy(cudaMemPool_t p){return 0;}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t p,enum cudaMemPoolAttr a,void*v){return 0;} cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t p,enum cudaMemPoolAttr a,void*v){return 0;} cudaError_t cudaMemPoolTrimTo(cudaMemPool_t p,size_t n){return 0;}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes*a,const void*f){memset(a,0,sizeof *a);a->maxThreadsPerBlock=1024;a->binaryVersion=90;a->ptxVersion=90;return 0;}
cudaError_t cudaFuncSetAttribute(const void*f,enum cudaFuncAttribute a,int v){return 0;}
static __thread cudaError_t last=0; cudaError_t cudaGetLastError(void){cudaError_t x=last;last=0;return x;} cudaError_t cudaPeekAtLastError(void){return last;}
cudaError_t cudaGraphDestroy(cudaGraph_t g){return 0;} cudaError_t cudaGraphExecDestroy(cudaGraphExec_t g){return 0;}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t*e,cudaGraph_t g,unsigned long long f){*e=(cudaGraphExec_t)A(8);return 0;}
cudaError_t cudaGraphLaunch(cudaGraphExec_t e,cudaStream_t s){graphlaunch++;return 0;}
static cudaError_t launch(dim3 g,dim3 b,size_t s){ /* what a device of this kind refuses, as it refuses it */
 int wrong=!g.x||!g.y||!g.z||g.x>2147483647u||g.y>65535||g.z>65535||!b.x||!b.y||!b.z||b.x>1024||b.y>1024||b.z>64||(size_t)b.x*b.y*b.z>1024||s>232448;
 launches++; if(!wrong)return 0; fprintf(stderr,"[emulated] a launch that a device refuses: grid %u,%u,%u block %u,%u,%u shared memory %zu\n",g.x,g.y,g.z,b.x,b.y,b.z,s); return last=cudaErrorInvalidConfiguration;}
cudaError_t cudaLaunchKernel(const void*f,dim3 g,dim3 b,void**a,size_t s,cudaStream_t st){return launch(g,b,s);}
cudaError_t __cudaLaunchKernel(cudaKernel_t f,dim3 g,dim3 b,void**a,size_t s,cudaStream_t st){return launch(g,b,s);}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*c,const void*f,void**a){return launch(c->gridDim,c->blockDim,c->dynamicSmemBytes);}
cudaError_t cudaLaunchCooperativeKernel(const void*f,dim3 g,dim3 b,void**a,size_t s,cudaStream_t st){return launch(g,b,s);}
cudaError_t __cudaGetKernel(cudaKernel_t*k,const void*f){*k=(cudaKernel_t)f;return 0;}
cudaError_t cudaMemGetInfo(size_t*f,size_t*t){*t=all_bytes();*f=*t-used;return 0;}
cudaError_t cudaMemcpy(void*d,const void*s,size_t n,enum cudaMemcpyKind k){memmove(d,s,n);return 0;}
cudaError_t cudaMemcpyAsync(void*d,const void*s,size_t n,enum cudaMemcpyKind k,cudaStream_t st){memcpys++; if(k!=cudaMemcpyDeviceToDevice)hostcopies++; if(capturing&&k!=cudaMemcpyDeviceToDevice)fprintf(stderr,"[emulated] memcpy kind %d n=%zu while capturing\n",k,n); memmove(d,s,n);return 0;}
cudaError_t cudaMemcpy2DAsync(void*d,size_t dp,const void*s,size_t sp,size_t w,size_t h,enum cudaMemcpyKind k,cudaStream_t st){for(size_t i=0;i<h;i++)memmove((char*)d+i*dp,(const char*)s+i*sp,w);return 0;}
cudaError_t cudaMemcpyFromSymbol(void*d,const void*s,size_t n,size_t o,enum cudaMemcpyKind k){memset(d,0,n);return 0;}
cudaError_t cudaMemset(void*d,int v,size_t n){memset(d,v,n);return 0;} cudaError_t cudaMemsetAsync(void*d,int v,size_t n,cudaStream_t s){memset(d,v,n);return 0;}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int*n,const void*f,int b,size_t s,unsigned fl){*n=2;return 0;}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes*a,const void*p){memset(a,0,sizeof *a);a->type=cudaMemoryTypeDevice;a->devicePointer=(void*)p;return 0;}
cudaError_t cudaStreamBeginCapture(cudaStream_t s,enum cudaStreamCaptureMode m){if(getenv("EMU_V"))fprintf(stderr,"[emulated] begin capture mode %d after %ld eager launches\n",m,launches);capturing=1;launches=0;return 0;}
cudaError_t cudaStreamEndCapture(cudaStream_t s,cudaGraph_t*g){capturing=0;*g=(cudaGraph_t)A(8);fprintf(stderr,"[emulated] captured %ld kernel launches\n",launches);return 0;}
cudaError_t cudaStreamIsCapturing(cudaStream_t s,enum cudaStreamCaptureStatus*st){*st=capturing?cudaStreamCaptureStatusActive:cudaStreamCaptureStatusNone;return 0;}
cudaError_t cudaStreamCreate(cudaStream_t*s){*s=(cudaStream_t)A(8);return 0;} cudaError_t cudaStreamCreateWithFlags(cudaStream_t*s,unsigned f){*s=(cudaStream_t)A(8);if(getenv("EMU_V"))fprintf(stderr,"[emulated] stream created flags %u (1=non-blocking)\n",f);return 0;}
cudaError_t cudaStreamDestroy(cudaStream_t s){return 0;}
cudaError_t cudaStreamSynchronize(cudaStream_t s){syncs++; if(capturing)fprintf(stderr,"[emulated] ILLEGAL cudaStreamSynchronize during capture\n");return 0;}
cudaError_t cudaStreamWaitEvent(cudaStream_t s,cudaEvent_t e,unsigned f){return 0;}
cudaError_t cudaLaunchHostFunc(cudaStream_t s,cudaHostFn_t f,void*u){f(u);return 0;}
long emu_launches(void){long x=launches;launches=0;return x;} long emu_syncs(void){long x=syncs;syncs=0;return x;} long emu_hostcopies(void){long x=hostcopies;hostcopies=0;return x;} long emu_memcpys(void){long x=memcpys;memcpys=0;return x;} long emu_graphs(void){long x=graphlaunch;graphlaunch=0;return x;}
// cuBLAS / cuBLASLt: count a GEMM as one launch
#define B(n) int n(){launches++;return 0;}
#define Z(n) int n(){return 0;}
int cublasCreate_v2(void**h){if(used>=all_bytes())return 3;*h=A(64);return 0;} int cublasLtCreate(void**h){*h=A(64);return 0;}
Z(cublasDestroy_v2)Z(cublasSetStream_v2)Z(cublasSetMathMode)Z(cublasLtDestroy) int cublasGetMathMode(void*h,int*m){*m=0;return 0;}
static int gemm(int ta,int tb,int m,int n,int k,int lda,int ldb,int ldc,int c){int a=ta?k:m,b=tb?n:k; launches++;
 if(m>=0&&n>=0&&k>=0&&c>=0&&lda>=(a?a:1)&&ldb>=(b?b:1)&&ldc>=(m?m:1))return 0; fprintf(stderr,"[emulated] a product that cuBLAS refuses: %d,%d,%d of rows %d,%d,%d, %d of them\n",m,n,k,lda,ldb,ldc,c); return 7;}
typedef const void*V;
int cublasGemmEx(V h,int ta,int tb,int m,int n,int k,V l,V A_,int at,int lda,V B_,int bt,int ldb,V be,V C,int ct,int ldc,int c,int g){return gemm(ta,tb,m,n,k,lda,ldb,ldc,1);}
int cublasGemmBatchedEx(V h,int ta,int tb,int m,int n,int k,V l,V A_,int at,int lda,V B_,int bt,int ldb,V be,V C,int ct,int ldc,int b,int c,int g){return gemm(ta,tb,m,n,k,lda,ldb,ldc,b);}
int cublasGemmStridedBatchedEx(V h,int ta,int tb,int m,int n,int k,V l,V A_,int at,int lda,long long sa,V B_,int bt,int ldb,long long sb,V be,V C,int ct,int ldc,long long sc,int b,int c,int g){return gemm(ta,tb,m,n,k,lda,ldb,ldc,b);}
int cublasSgemm_v2(V h,int ta,int tb,int m,int n,int k,V l,V A_,int lda,V B_,int ldb,V be,V C,int ldc){return gemm(ta,tb,m,n,k,lda,ldb,ldc,1);}
int cublasSgemmBatched(V h,int ta,int tb,int m,int n,int k,V l,V A_,int lda,V B_,int ldb,V be,V C,int ldc,int b){return gemm(ta,tb,m,n,k,lda,ldb,ldc,b);}
int cublasSgemmStridedBatched(V h,int ta,int tb,int m,int n,int k,V l,V A_,int lda,long long sa,V B_,int ldb,long long sb,V be,V C,int ldc,long long sc,int b){return gemm(ta,tb,m,n,k,lda,ldb,ldc,b);}
B(cublasDgemm_v2)B(cublasSgeam)B(cublasDgeam)B(cublasScopy_v2)B(cublasSscal_v2)
B(cublasLtMatmul)Z(cublasLtMatmulAlgoConfigSetAttribute)Z(cublasLtMatmulAlgoInit)
int cublasLtMatmulAlgoGetHeuristic(void*h,void*o,void*a,void*b,void*c,void*d,void*p,int r,void*res,int*n){*n=1;return 0;}
int cublasLtMatmulDescCreate(void**p){*p=A(512);return 0;}Z(cublasLtMatmulDescDestroy)Z(cublasLtMatmulDescSetAttribute) int cublasLtMatmulPreferenceCreate(void**p){*p=A(512);return 0;}
Z(cublasLtMatmulPreferenceDestroy)Z(cublasLtMatmulPreferenceSetAttribute) int cublasLtMatrixLayoutCreate(void**p){*p=A(512);return 0;} Z(cublasLtMatrixLayoutDestroy)Z(cublasLtMatrixLayoutSetAttribute)B(cublasLtMatrixTransform)
cudaError_t cudaMemcpy3DAsync(const struct cudaMemcpy3DParms*p,cudaStream_t s){memcpys++;
 for(size_t z=0;z<p->extent.depth;z++)for(size_t y=0;y<p->extent.height;y++)
  memmove((char*)p->dstPtr.ptr+((z+p->dstPos.z)*p->dstPtr.ysize+y+p->dstPos.y)*p->dstPtr.pitch+p->dstPos.x,
   (char*)p->srcPtr.ptr+((z+p->srcPos.z)*p->srcPtr.ysize+y+p->srcPos.y)*p->srcPtr.pitch+p->srcPos.x,p->extent.width);return 0;}
cudaError_t cudaMemset3DAsync(struct cudaPitchedPtr p,int v,struct cudaExtent e,cudaStream_t s){
 for(size_t z=0;z<e.depth;z++)for(size_t y=0;y<e.height;y++)memset((char*)p.ptr+(z*p.ysize+y)*p.pitch,v,e.width);return 0;}
